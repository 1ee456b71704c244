"""What several commands share: names, sizes, files, the machine, work spread over processes."""
