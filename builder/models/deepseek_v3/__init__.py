"""The family of DeepSeek-V3 and R1: multi-head latent attention, routed experts, MTP modules."""
