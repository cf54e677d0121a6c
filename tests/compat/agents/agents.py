"""Coding agents as their makers ship them: where each one comes from, and how it is run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMAND = "echo proof-$((40 + 2)) > proof.txt; cat proof.txt"
PROOF = "proof-42"
"""Printed by `COMMAND`, if it really ran."""
ANSWER = "The file is written."

_PROGRAMS = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class CodingAgent:
    """An agent, and what a model says that uses its shell once and then ends."""

    package: str
    """With its version; of PyPI where it has `==`, else of npm. With what it needs besides."""
    command: str
    """For `sh`, with the task in `$task`."""
    tool: str
    """Its shell."""
    arguments: dict[str, Any]
    """Of a call of its shell."""
    end: tuple[str, dict[str, Any]] | None = None
    """The tool that ends its work; None: it ends at an answer without a call."""
    own_history: bool = False
    """Whether it sends earlier turns as a text of its own, so that each call begins a trajectory."""


AGENTS = {
    "codex": CodingAgent(
        package="@openai/codex@0.169.0",
        command=r"""codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -m $ROLLSTREAM_MODEL \
    -c 'model_provider="rollstream"' -c "model_providers.rollstream={name='rollstream', wire_api='responses',
        base_url='$OPENAI_BASE_URL', env_key='OPENAI_API_KEY'}" "$task"
""",
        tool="exec_command",
        arguments={"cmd": COMMAND},
    ),
    "claude": CodingAgent(
        package="@anthropic-ai/claude-code@2.1.328",
        command="""export IS_SANDBOX=1 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
claude -p "$task" --model $ROLLSTREAM_MODEL --dangerously-skip-permissions
""",
        tool="Bash",
        arguments={"command": COMMAND, "description": "Writes a file"},
    ),
    "opencode": CodingAgent(
        package="opencode-ai@1.18.33",
        command=r"""echo '{"provider": {"rollstream": {"npm": "@ai-sdk/openai-compatible", "models": {"rollstream": {}},
    "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"}}}}' > opencode.json
opencode run --model rollstream/$ROLLSTREAM_MODEL "$task"
""",
        tool="bash",
        arguments={"command": COMMAND, "description": "Writes a file"},
    ),
    "qwen": CodingAgent(
        package="@qwen-code/qwen-code@0.24.4",
        command='qwen --yolo --auth-type openai --model $ROLLSTREAM_MODEL -p "$task"',
        tool="run_shell_command",
        arguments={"command": COMMAND, "is_background": False},
    ),
    "cline": CodingAgent(
        package="cline@3.0.65",
        command="""cline auth -p openai -k $OPENAI_API_KEY -m $ROLLSTREAM_MODEL -b $OPENAI_BASE_URL
cline -P openai -m $ROLLSTREAM_MODEL "$task"
""",
        tool="run_commands",
        arguments={"commands": [COMMAND]},
    ),
    "mini": CodingAgent(
        package="mini-swe-agent==2.4.6",
        command="""export MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors
mini -y --exit-immediately -m openai/$ROLLSTREAM_MODEL -t "$task"
""",
        tool="bash",
        arguments={"command": COMMAND},
        end=("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),
    ),
    "deepagents": CodingAgent(
        package="deepagents==0.7.6 langchain-openai==1.7.4",
        command=f'python {_PROGRAMS / "deepagents_program.py"} "$task"',
        tool="execute",
        arguments={"command": COMMAND},
    ),
    "gptme": CodingAgent(
        package="gptme==0.35.1",
        command='gptme --non-interactive --model local/$ROLLSTREAM_MODEL --tool-format tool "$task"',
        tool="shell",
        arguments={"command": COMMAND},
        end=("complete", {}),
    ),
    "smolagents": CodingAgent(
        package="smolagents[openai]==1.26.0",
        command=f'python {_PROGRAMS / "smolagents_program.py"} "$task"',
        tool="shell",
        arguments={"command": COMMAND},
        end=("final_answer", {"answer": ANSWER}),
        own_history=True,
    ),
}
