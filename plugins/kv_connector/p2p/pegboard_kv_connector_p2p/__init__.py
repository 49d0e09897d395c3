"""The KV connector `p2p`: engines send each other KV blocks over TCP."""
