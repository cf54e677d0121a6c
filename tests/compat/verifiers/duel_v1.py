"""An environment of two agents of verifiers 0.4: a solver that is trained, and a critic that is not."""

import verifiers.v1 as vf

__all__ = ["DuelEnv"]


class DuelConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()


class DuelEnv(vf.Env[DuelConfig]):
    async def setup(self, agents: vf.Agents) -> None:
        agents.critic.trainable = False

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        await agents.solver.run(task)
        await agents.critic.run(task)
        await agents.solver.run(task)

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        for at, trace in enumerate(episode.traces):
            trace.record_reward("place", float(at), 10.0)
