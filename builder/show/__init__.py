"""Tables, pictures and JSON files that all measuring commands share."""
