"""What tests and soaks run with: clients, fake nodes, tiny models, engines in processes of their own."""
