"""Code that families share: layers, number formats inside the model, splitting among ranks."""
