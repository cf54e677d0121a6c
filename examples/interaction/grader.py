"""An interaction: somebody who looks at every answer, and says so until it is right."""

from uuid import uuid4

from rollstream.agent.interactions import Interaction


class Grader(Interaction):
    """Knows the right answer."""

    def __init__(self, config):
        super().__init__(config)
        self.rollouts = {}

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        """The row's `interaction_kwargs` come as keywords, to every method."""
        instance_id = instance_id or uuid4().hex
        self.rollouts[instance_id] = {"truth": ground_truth, "tries": 0}
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        """Looks at the last message, the model's."""
        state = self.rollouts[instance_id]
        state["tries"] += 1
        if messages[-1]["content"].strip() == state["truth"]:
            return True, "", 1.0, {}
        return False, self.config["feedback"], 0.0, {}

    async def calculate_score(self, instance_id, **kwargs):
        """Fewer tries are better."""
        return 1.0 / self.rollouts[instance_id]["tries"]

    async def finalize_interaction(self, instance_id, **kwargs):
        """Forgets the rollout."""
        self.rollouts.pop(instance_id, None)
