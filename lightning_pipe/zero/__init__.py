"""ZeRO: replicas divide among them what they would each hold (Rajbhandari et al. 2020).

Stage 1 divides the states of the optimizer, stage 2 the gradients as well: each parameter belongs
to one replica, which alone updates it and gives it to the others. Stage 3 divides the parameters,
too, each into equal parts: that is torch's ``fully_shard``.
"""

from lightning_pipe.zero.division import Division

__all__ = ["Division"]
