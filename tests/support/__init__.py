"""What tests share: corpora, servers, processes, the engine, ledgers."""
