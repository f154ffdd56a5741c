"""The gated delta rule: a matrix per head that each token decays and corrects."""
