"""Names the plugin that owns options, markers and fixtures; see harness/plugins/."""

pytest_plugins = ["degarble.harness.plugins.pytest_plugin"]
