"""What families share: layers, number formats inside the model, and how ranks split and meet."""
