"""One folder a domain: its options, its data, its model and its task. Nothing outside imports one."""
