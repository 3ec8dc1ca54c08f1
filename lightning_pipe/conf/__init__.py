"""Hydra configurations of PipelineStrategy, found with ``pkg://lightning_pipe.conf``.

``strategy`` is a link to this project's own ``conf/strategy``; in a wheel it is a copy. The other
groups of ``conf`` describe the examples, and stay with them.
"""
