"""One package or file per engine or foreign format, each with the same verbs: capture, install, plan."""
