"""What an engine is: its states, its controls, its programs and its manifest. No torch here."""
