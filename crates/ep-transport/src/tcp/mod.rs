//! The control plane over TCP: a star whose hub is a thread in rank 0's process.
//!
//! * `wire`: frames and messages.
//! * `hub`, `room`: what the hub does, as a state machine.
//! * `server`: the sockets around it.
//! * `client`, `control`: a rank's connection, and the groups on it.
//!
//! # When rank 0 leaves
//! The hub lives until the last rank has gone, also if rank 0 has dropped its groups by then. It
//! ends with rank 0's process, though: then the others' collectives fail with "rank 0 has left",
//! while operations of the data plane that need no control plane still complete.

pub(crate) mod client;
pub(crate) mod control;
pub(crate) mod hub;
mod room;
pub(crate) mod server;
pub(crate) mod wire;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::Deadline;

/// An encoded frame, shared by all it is sent to.
pub(crate) type Bytes = Arc<[u8]>;

/// The moment `grace` after a deadline, which may be as good as never.
pub(crate) fn moment(deadline: Deadline, grace: Duration) -> Instant {
    const MONTH: Duration = Duration::from_secs(30 * 24 * 3600);
    Instant::now() + deadline.remaining().min(MONTH) + grace
}

/// Small messages go at once, and a peer whose machine is gone is noticed: after 10 s of silence the
/// kernel asks three times, 5 s apart. Best effort.
pub(crate) fn configure(stream: &std::net::TcpStream) {
    use rustix::net::sockopt;
    let _ = stream.set_nodelay(true);
    let _ = sockopt::set_socket_keepalive(stream, true);
    let _ = sockopt::set_tcp_keepidle(stream, Duration::from_secs(10));
    let _ = sockopt::set_tcp_keepintvl(stream, Duration::from_secs(5));
    let _ = sockopt::set_tcp_keepcnt(stream, 3);
    let _ = sockopt::set_tcp_user_timeout(stream, 30_000);
}

/// An error with what to do about it, where descriptors have run out.
pub(crate) fn explained(e: &std::io::Error) -> String {
    use rustix::io::Errno;
    match Errno::from_io_error(e) {
        Some(Errno::MFILE) => format!("{e}: raise `ulimit -n` where that process is started"),
        Some(Errno::NFILE) => format!("{e}: raise fs.file-max on its host"),
        _ => e.to_string(),
    }
}

/// `rank 3`, or `ranks 1, 2`; long lists are cut.
pub(crate) fn ranks_text(ranks: &[usize]) -> String {
    const SHOWN: usize = 16;
    let list: Vec<String> = ranks.iter().take(SHOWN).map(usize::to_string).collect();
    let more = if ranks.len() > SHOWN {
        format!(" and {} more", ranks.len() - SHOWN)
    } else {
        String::new()
    };
    format!("rank{} {}{more}", if ranks.len() == 1 { "" } else { "s" }, list.join(", "))
}
