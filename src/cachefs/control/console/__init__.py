"""The console: a page in the browser that shows live what a mount does. docs/CONSOLE.md explains
it."""
