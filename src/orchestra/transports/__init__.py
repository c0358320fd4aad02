"""Messages of tensors between ranks: `protocol.Transport`, carried by `sockets.SocketTransport`."""
