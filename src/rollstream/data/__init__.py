"""Prompt rows: files to `PromptRow`, and the task system that builds such files.

`prompts.load_prompts` is the way in; `tasks` and `task_cache` turn `train_tasks` into Parquet files.
"""
