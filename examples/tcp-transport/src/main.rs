//! A round of dispatch and combine over TCP: every token comes back doubled.

use std::error::Error;
use std::net::Ipv4Addr;

use ep_runtime::{
    CombineOpts, DispatchOpts, EpBuilder, EpError, Group, Ids, MoeShape, Payload, PayloadKind,
    Queue, Route, Rows, RowsMut,
};
use tcp_transport::TcpTransport;

const RANKS: usize = 3;
const HIDDEN: usize = 256;
const TOKENS: usize = 100;
const EXPERTS: usize = 12;

/// Rows that came to this rank, if all that came back is right.
fn rank(group: &Group) -> Result<usize, EpError> {
    // A token takes one expert, so it goes to one rank.
    let shape = MoeShape::new(HIDDEN, 1, EXPERTS).max_tokens(TOKENS).payload(PayloadKind::F32);
    let ep = EpBuilder::new(shape)
        .transport(TcpTransport::at(Ipv4Addr::LOCALHOST.into()))
        .build(group)?;
    let queue = Queue::host();

    let tokens: Vec<f32> = (0..TOKENS * HIDDEN).map(|i| (i + group.rank()) as f32).collect();
    let ids: Vec<i32> = (0..TOKENS).map(|t| ((t * 7 + group.rank()) % EXPERTS) as i32).collect();
    let route = Route::Topk { ids: Ids::I32(&ids), weights: None };
    let payload = Payload::new(Rows::new(&tokens, HIDDEN)?)?;
    let mut received = ep.dispatch(&queue, payload, route, &DispatchOpts::default())?;

    let rows = received.num_rows();
    let mut outputs = received.rows_mut(PayloadKind::F32)?;
    for row in 0..rows {
        outputs.payload().row_mut::<f32>(row).iter_mut().for_each(|x| *x *= 2.0);
    }

    let mut out = vec![0.0f32; TOKENS * HIDDEN];
    received.combine(&queue, RowsMut::new(&mut out, HIDDEN)?, &CombineOpts::default())?;
    let wrong = (0..out.len()).find(|&i| out[i] != 2.0 * tokens[i]);
    assert_eq!(wrong, None, "a value of rank {} came back wrong", group.rank());
    Ok(rows)
}

fn main() -> Result<(), Box<dyn Error>> {
    let groups = Group::local(RANKS)?;
    let rows = std::thread::scope(|scope| {
        let ranks: Vec<_> = groups.iter().map(|group| scope.spawn(move || rank(group))).collect();
        let join = |rank: std::thread::ScopedJoinHandle<'_, _>| rank.join().expect("no panic");
        ranks.into_iter().map(join).collect::<Result<Vec<_>, EpError>>()
    })?;
    println!(
        "{RANKS} ranks over TCP received {rows:?} rows; all {TOKENS} tokens of each came back"
    );
    Ok(())
}
