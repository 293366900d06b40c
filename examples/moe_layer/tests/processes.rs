//! Ranks as processes make the same calls.

use std::net::TcpListener;
use std::process::{Command, Stdio};

#[test]
fn two_processes_share_the_layer() {
    // A port that was free a moment ago.
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("an address").to_string();
    drop(listener);
    let start = |rank: usize| {
        Command::new(env!("CARGO_BIN_EXE_moe_layer"))
            .args(["--tokens", "9", "--hidden", "32", "--ffn", "32"])
            .env("EP_RENDEZVOUS", &address)
            .env("EP_RANK", rank.to_string())
            .env("EP_WORLD", "2")
            .env("EP_TIMEOUT", "20")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts")
    };
    for (rank, process) in [start(0), start(1)].into_iter().enumerate() {
        let output = process.wait_with_output().expect("the program ends");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        assert!(text.starts_with(&format!("rank {rank} of 2, a process")), "{text}");
        assert_eq!(text.matches("same bits").count(), 4, "{text}");
    }
}
