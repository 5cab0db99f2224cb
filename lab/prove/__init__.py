"""`kvferry prove`: try faults on a pair of vLLM servers with any KV connector, and judge every answer.

It talks to servers over HTTP and by signals only, and knows no connector but by its `kv_transfer_config`, or
`ec_transfer_config` if an encoder is apart. So it judges kvferry as it judges the others.
"""
