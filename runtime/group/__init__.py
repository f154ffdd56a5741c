"""The processes that share an engine of several ranks: how they start, meet and end."""
