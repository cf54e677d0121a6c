"""Chat APIs over HTTP: their requests as our nouns, our nouns as their answers."""
