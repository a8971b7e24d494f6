"""The tables: run row by row, kept as JSON, written as Markdown, drawn."""
