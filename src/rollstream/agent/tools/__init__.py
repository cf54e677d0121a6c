"""Tools of agent loops: functions, classes and MCP servers."""
