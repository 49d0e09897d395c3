"""What KV connectors share if their engines exchange blocks with each other. A connector brings a
`Transport`. Import from the submodules."""
