"""Reading what a model wrote in one turn: thinking, content, tool calls. Start at `base.get_parser`."""
