"""An OpenAI-compatible server over an engine: `mtpbuild serve`, the dependency group `serve`."""
