# The developers' commands: `just` lists them. Each is one line that also works by itself.

python := ".venv/bin/python"

# List the commands
default:
    @just --list

# Make .venv with the development tools
install:
    python3 -m venv .venv
    .venv/bin/pip install -q -c constraints.txt torch==2.13.0 -e '.[dev]'

# Run tests: all, or those that are named
test *ARGUMENTS:
    {{python}} -m pytest -n 3 --dist loadfile {{ARGUMENTS}}

# Measure what tests cover, all or those that are named; ranks in processes of their own don't count
coverage *ARGUMENTS:
    {{python}} -m pytest -n 2 --dist loadfile --cov --cov-report=term:skip-covered {{ARGUMENTS}}

# Check style, format, types and layers
lint:
    .venv/bin/ruff check
    .venv/bin/ruff format --check
    .venv/bin/mypy
    .venv/bin/lint-imports

# Write the generated pages and drawings, and build the site into site/
docs:
    {{python}} -m tests.support.commands_page > docs/reference/commands.md
    {{python}} -m tests.support.experiment_page > docs/reference/experiment.md
    {{python}} -m studies.messages docs/images/messages
    {{python}} -m studies.results
    NO_MKDOCS_2_WARNING=1 {{python}} -m mkdocs build

# Show the site while pages change
serve:
    NO_MKDOCS_2_WARNING=1 {{python}} -m mkdocs serve

# Run a benchmark: just bench server --help
bench NAME *ARGUMENTS:
    {{python}} -m benchmarks.{{NAME}} {{ARGUMENTS}}

# Make the runs of the report's questions, which takes hours: just study --only 3
study *ARGUMENTS:
    {{python}} -m studies.questions {{ARGUMENTS}}

# Build the report into build/report/, as PDF and HTML
report:
    {{python}} -m studies.report
