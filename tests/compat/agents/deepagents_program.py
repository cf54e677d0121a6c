"""A deep agent with the shell of its library, asked the first argument."""

import os
import sys

from deepagents import create_deep_agent
from deepagents.backends import LocalShellBackend
from langchain_openai import ChatOpenAI

agent = create_deep_agent(ChatOpenAI(model=os.environ["ROLLSTREAM_MODEL"]), backend=LocalShellBackend())
agent.invoke({"messages": [{"role": "user", "content": sys.argv[1]}]})
