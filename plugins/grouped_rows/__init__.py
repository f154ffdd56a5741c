"""What grouped-query attention does between its product and its scores."""
