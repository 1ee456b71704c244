"""What several commands share: arguments, text, the machine."""
