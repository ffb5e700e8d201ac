"""
Starting vLLM servers for a trainer, watching them and ending them. No command line, and nothing is printed here.

What is asked for ([`ServeOptions`]) and what is installed ([`VLLMBuild`]) become one [`ServerCommand`] per server, or
a `ConfigurationError` before any process exists. [`Server`] runs one command behind a guard, [`Supervisor`] runs them
all.
"""
