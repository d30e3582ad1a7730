"""Public test tools: a fake trainer with a fitted plant, faults for it, and contracts to subclass.

    plant      the arithmetic of one rollout, fitted to real runs
    fake       FakeTrainer: the plant with a trainer's outside, and its adapter
    faults     what can be broken on purpose
    worlds     causes and sensors that the plant itself has not: GPU memory, a critic, stale data
    adapters   AdapterContract and GuestContract: subclass them in your own tests
    contracts  PolicyContract, and both of these again

Importing this package loads numpy and nothing heavier.
"""

from autotune.testing.fake import FakeTrainer
from autotune.testing.faults import Fault
from autotune.testing.plant import HEALTHY, Constants
from autotune.trainer.records import RolloutRecord

__all__ = ["HEALTHY", "Constants", "FakeTrainer", "Fault", "RolloutRecord"]
