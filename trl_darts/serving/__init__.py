"""
Starts vLLM servers for a trainer, monitors them and stops them. This package has no command line and prints nothing.

The user's options ([`ServeOptions`]) and the installed vLLM ([`VLLMBuild`]) give one [`ServerCommand`] per server, or
a `ConfigurationError` before any process exists. [`Server`] runs one command under a guard, [`Supervisor`] runs all.
"""
