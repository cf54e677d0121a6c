"""Python imports this when it starts, where this folder is on PYTHONPATH: torch is not found there."""

import sys
from importlib.machinery import PathFinder


class WithoutTorch(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname == "torch" else PathFinder.find_spec(fullname, path, target)


sys.meta_path[:] = [WithoutTorch if finder is PathFinder else finder for finder in sys.meta_path]
