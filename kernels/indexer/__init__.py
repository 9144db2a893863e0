"""The lightning indexer: operands, scores, choice."""
