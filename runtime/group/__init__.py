"""The processes of a multi-rank engine: starting them, connecting them, shutting down."""
