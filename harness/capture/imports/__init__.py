"""Turn dumps that other tools write into captures."""
