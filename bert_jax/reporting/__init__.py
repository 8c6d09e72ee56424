"""The documents behind reports, plans and inspections: their content, and how pages and terminals show it."""
