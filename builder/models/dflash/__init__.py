"""DFlash and DSpark heads: a few layers that draft a block of tokens in one pass.

Each verified token makes a row of context, of the trunk's hidden states after some of its layers;
the head's layers have keys and values of it in their caches. A block is the newest token and masks.
Its tokens attend to the context and to the whole block. Of DFlash each mask's logits are a draft,
for itself. DSpark's first token has a draft, too, and each draft's logits get a bias of the token
before it, left to right. Formats: z-lab's dflash, DeepSpec, SpecForge.
"""
