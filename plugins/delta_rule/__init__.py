"""The gated delta rule: a state matrix per head, which each token decays and corrects."""
