"""Tables, pictures and JSON files, as all commands that measure show their figures."""
