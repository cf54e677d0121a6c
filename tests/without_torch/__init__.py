"""For processes that have no use for torch: they start in half the time where they do not find it.

transformers imports torch wherever it is installed, and nothing but engine `hf` needs it.
"""

import os
from pathlib import Path


def without_torch() -> dict[str, str]:
    """The environment of such a process: `sitecustomize`, which is beside this file, hides torch in it."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}
