"""Before a run: whether it would be refused, and whether its gradients are those of one device."""
