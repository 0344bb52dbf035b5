//! Connections: their number, TLS, and timeouts for silent or slow clients.

use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_io_timeout::TimeoutStream;
use tokio_rustls::TlsAcceptor;

use super::{Peer, Phase, Shared, router};
use crate::failure::Failure;

/// Time for a handshake and for a request's header; idle connections are closed after it, too.
const HEAD: Duration = Duration::from_secs(20);
/// How long a client may stop reading an answer.
const TAKE: Duration = Duration::from_secs(30);
/// Size limit of a request's header, and of a connection's buffer.
const BUFFER: usize = 64 << 10;

/// TLS with a certificate chain and a private key, both PEM files.
pub(in crate::server) fn tls(cert: &Path, key: &Path) -> Result<TlsAcceptor, Failure> {
    let wrong = |path: &Path, error: &dyn std::fmt::Display| Failure::new(format!("{}: {error}", path.display()));
    let chain = CertificateDer::pem_file_iter(cert)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| wrong(cert, &error))?;
    if chain.is_empty() {
        return Err(wrong(cert, &"no certificate in it"));
    }
    let private = PrivateKeyDer::from_pem_file(key).map_err(|error| wrong(key, &error))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, private))
        .map_err(|error| wrong(cert, &error))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Accepts connections until the server stops, and lets answers leave.
pub(in crate::server) async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    let router = router(Arc::clone(&shared));
    let room = Arc::new(Semaphore::new(shared.options.limits.connections));
    let graceful = GracefulShutdown::new();
    let mut phase = shared.phase.subscribe();
    loop {
        let stopped = async {
            // The sender lives as long as the server.
            let _ = phase.wait_for(|phase| *phase == Phase::Stopped).await;
        };
        let accepted = async {
            // Never closed.
            let permit = Arc::clone(&room).acquire_owned().await;
            (listener.accept().await, permit)
        };
        let (accepted, permit) = tokio::select! {
            accepted = accepted => accepted,
            () = stopped => break,
        };
        let Ok((stream, peer)) = accepted else {
            // For example too many open files, which is temporary.
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let router = router.clone().layer(axum::Extension(Peer(peer.ip())));
        let tls = shared.tls.read().unwrap_or_else(PoisonError::into_inner).clone();
        let watcher = graceful.watcher();
        tokio::spawn(async move {
            let _permit = permit;
            // Send small events at once.
            let _ = stream.set_nodelay(true);
            match tls {
                None => connection(stream, router, watcher).await,
                Some(tls) => {
                    if let Ok(Ok(stream)) = tokio::time::timeout(HEAD, tls.accept(stream)).await {
                        connection(stream, router, watcher).await;
                    }
                }
            }
        });
    }
    drop(listener);
    graceful.shutdown().await;
}

async fn connection<S>(stream: S, router: Router, watcher: Watcher)
where
    S: AsyncRead + AsyncWrite + Send + 'static,
{
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(TAKE));
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(BUFFER)
        .serve_connection(TokioIo::new(Box::pin(stream)), TowerToHyperService::new(router));
    // Errors and disconnects of clients are in the request log.
    let _ = watcher.watch(served).await;
}
