"""What a buffer's server takes from here, by its entry point of `rollstream.generators`."""

from rollstream.integrations.slime.generator_files import GeneratorFiles
from rollstream.integrations.slime.hook_process import HookProcess
from rollstream.integrations.slime.jobs import Jobs
from rollstream.integrations.slime.payload_rules import PayloadRules
from rollstream.integrations.slime.routes import SlimeRoutes, render_slime_error

__all__ = ["GeneratorFiles", "HookProcess", "Jobs", "PayloadRules", "SlimeRoutes", "render_slime_error"]
