"""Tables, pictures and files of results that all measuring commands share."""
