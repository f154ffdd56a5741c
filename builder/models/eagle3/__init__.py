"""EAGLE-3 heads: one layer that reads taps of a trunk's residual stream, and drafts in a chain.

A tap is the residual stream that enters a layer of the trunk. For each verified token `fc` joins
the taps to a hidden state g; for drafts g is the layer's own output. The layer attends over [token
; g], each normed, and adds to g alone. Formats: SafeAILab's EAGLE, SpecForge, speculators (vLLM).
"""
