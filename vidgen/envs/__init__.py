"""A trained world model as an environment of gymnasium, registered as `vidgen/WorldModel-v0`.

Example:
    ```py
    import gymnasium, vidgen.envs

    env = gymnasium.make("vidgen/WorldModel-v0", pipeline="runs/doom/model")
    envs = gymnasium.make_vec("vidgen/WorldModel-v0", num_envs=8, pipeline="runs/doom/model")
    ```
"""

from __future__ import annotations

from vidgen.envs.reward_head import RewardHead, RewardMethod
from vidgen.envs.rollouts import Starts
from vidgen.envs.vector_env import WorldModelVectorEnv
from vidgen.envs.world_model_env import WorldModelEnv

__all__ = ["RewardHead", "RewardMethod", "Starts", "WorldModelEnv", "WorldModelVectorEnv", "register"]


def register() -> None:
    """Makes `vidgen/WorldModel-v0` known to gymnasium; importing this package has done it."""
    import gymnasium

    gymnasium.register(
        id="vidgen/WorldModel-v0",
        entry_point="vidgen.envs.world_model_env:WorldModelEnv",
        vector_entry_point="vidgen.envs.vector_env:WorldModelVectorEnv",
    )


register()
