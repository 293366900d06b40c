//! What is asked of a NIC that is a table of functions.

use proptest::prelude::*;

use super::super::layout::Layout;
use super::super::mock::{Nic, pages};
use super::*;
use crate::{RdmaPlan, WindowSpec};

fn opened(nic: &Nic, memory: &[(usize, Source)], world: usize, options: &Options) -> Endpoint {
    let gid = None;
    let chosen = Chosen { device: nic.context.name.clone(), port: 1, gid, numa_node: None };
    let bulk: Vec<usize> = (1..world).collect();
    Endpoint::on(nic.context.clone(), &chosen, memory, (&bulk, world), options).unwrap()
}

fn whole(bytes: usize) -> [(usize, Source); 1] {
    [(0, Source::Pages { region: pages(bytes), from: 0 })]
}

/// Each side expects the packet number that the other starts with, and no two start alike.
#[test]
fn connections_start_at_random_packets_that_both_sides_know() {
    let options = Options { queue_pairs: 4, ..Options::default() };
    let nics = ["a", "b"].map(Nic::new);
    let mut ends = [0, 1].map(|i| opened(&nics[i], &whole(4096), 2, &options));
    // Both have made their queue pairs for a rank 1: each is that to the other.
    let cards = [0, 1].map(|i| ends[1 - i].card(&options));
    for (end, card) in ends.iter_mut().zip(&cards) {
        end.connect(1, 1, card, &options).unwrap();
    }
    let packets = nics.each_ref().map(|nic| {
        nic.asked(|asked| {
            let expects: Vec<u32> = asked.packets.iter().filter_map(|p| p.1).collect();
            let sends: Vec<u32> = asked.packets.iter().filter_map(|p| p.2).collect();
            (expects, sends)
        })
    });
    assert_eq!((packets[0].0.len(), packets[0].1.len()), (4, 4));
    assert_eq!(packets[0].0, packets[1].1);
    assert_eq!(packets[1].0, packets[0].1);
    let mut all = [packets[0].1.clone(), packets[1].1.clone()].concat();
    assert!(all.iter().all(|&packet| packet < 1 << 24));
    all.sort_unstable();
    all.dedup();
    assert!(all.len() > 6, "eight random numbers of 24 bits are hardly ever so alike: {all:?}");
}

/// A window on a GPU is known by its dma-buf and the GPU's address, what is behind it by the host's.
#[cfg(feature = "cuda")]
#[test]
fn a_dma_buf_is_an_area_of_its_own() {
    use super::super::areas::DmaBuf;
    let nic = Nic::new("c");
    let words = pages(3 * 4096);
    let fd = || rustix::fs::memfd_create("dma-buf", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let buf = || DmaBuf { fd: fd(), address: 7 << 40, bytes: 65_536, _memory: Box::new(()) };
    let memory = |buf| {
        let behind = Source::Pages { region: words.clone(), from: 4096 };
        [(0, Source::DmaBuf(Arc::new(buf))), (4096, behind)]
    };
    let end = opened(&nic, &memory(buf()), 2, &Options::default());
    // Local and remote writes, and any order of them.
    let access = 1 | 2 | ffi::ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING.0 as i32;
    nic.asked(|asked| {
        assert_eq!(asked.dma_bufs, [(0, 65_536, 7 << 40, access)]);
        assert_eq!(asked.registered, [2 * 4096]);
    });
    let base = words.base().as_ptr() as u64;
    assert_eq!(end.local(100), ((7 << 40) + 100, 10));
    assert_eq!(end.local(5000), (base + 5000, 11));
    let card = end.card(&Options::default());
    assert_eq!(areas::find(&card.areas, 100), ((7 << 40) + 100, 1010));
    assert_eq!(areas::find(&card.areas, 5000), (base + 5000, 1011));
    drop(end);
    // A NIC's driver that knows no dma-bufs, one that fails, and a library that is too old.
    let refused = |nic: &Nic| {
        let chosen = Chosen { device: "c".into(), port: 1, gid: None, numa_node: None };
        let (context, options) = (nic.context.clone(), Options::default());
        Endpoint::on(context, &chosen, &memory(buf()), (&[1], 2), &options).unwrap_err()
    };
    nic.asked(|asked| asked.refusal = Some(libc::EOPNOTSUPP));
    let Refused::Unreachable(why) = refused(&nic) else { panic!("a failure") };
    assert!(why.contains("c takes no dma-buf of 65536 bytes"), "{why}");
    for code in [libc::ENOMEM, libc::EINVAL] {
        nic.asked(|asked| asked.refusal = Some(code));
        let Refused::Failed(error) = refused(&nic) else { panic!("{code} is no lack of support") };
        assert_eq!((error.kind(), error.code()), (crate::ErrorKind::Device, Some(code)));
    }
    let Refused::Unreachable(why) = refused(&Nic::without_dma_bufs("c")) else { panic!() };
    assert!(why.contains("version 34"), "{why}");
}

/// A port that went down after it was chosen raises no event any more.
#[test]
fn a_port_that_is_down_by_then_is_an_error() {
    let nic = Nic::new("d");
    nic.asked(|asked| asked.down = true);
    let chosen = Chosen { device: "d".into(), port: 1, gid: None, numa_node: None };
    let (context, options) = (nic.context.clone(), Options::default());
    let refused = Endpoint::on(context, &chosen, &whole(4096), (&[1], 2), &options);
    let error = TransportError::from(refused.unwrap_err());
    assert_eq!(error.code(), Some(libc::ENETDOWN));
    assert!(error.to_string().contains("port 1 of d is down"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// What is planned is what is asked for.
    #[test]
    fn plans_are_what_is_asked_for(
        world in 2usize..9,
        mapped in 0usize..3,
        nics in 1usize..4,
        queue_pairs in 1usize..4,
        depth in 8usize..200,
        bytes in 1usize..100_000,
        flags in 1u32..9,
    ) {
        let spec = WindowSpec { bytes, flags };
        // A rank maps itself and perhaps others.
        let bulk: Vec<usize> = (1 + mapped.min(world - 2)..world).collect();
        let options = Options { nics, queue_pairs, depth, ..Options::default() };
        let plan = RdmaPlan::new(spec, world, bulk.len(), (nics, queue_pairs, depth)).unwrap();
        let layout = Layout::new(spec, world, nics).unwrap();
        let memory = whole(layout.bytes);
        let mut sum = (0, 0, 0, 0);
        for i in 0..nics {
            let nic = Nic::new(&format!("nic{i}"));
            let chosen =
                Chosen { device: "nic".into(), port: 1, gid: None, numa_node: None };
            let context = nic.context.clone();
            let end = Endpoint::on(context, &chosen, &memory, (&bulk, world), &options).unwrap();
            nic.asked(|asked| {
                sum.0 += asked.pairs.len();
                sum.1 += asked.pairs.iter().map(|pair| pair.0 as usize).sum::<usize>();
                sum.2 += asked.pairs.iter().map(|pair| pair.1 as usize).sum::<usize>();
                sum.3 += asked.completions[0] as usize;
                assert_eq!(asked.registered, [plan.registered]);
            });
            drop(end);
        }
        prop_assert_eq!(sum.0, plan.queue_pairs);
        prop_assert_eq!(sum.1, plan.sends);
        prop_assert_eq!(sum.2, plan.receives);
        prop_assert_eq!(sum.3, plan.completions);
        prop_assert_eq!(layout.bytes, plan.window + plan.flags + plan.mailboxes);
        prop_assert_eq!(layout.bytes, plan.registered);
        prop_assert_eq!(plan.rings, nics * crate::ring::Ring::new(crate::rdma_plan::RING).unwrap().allocated());
    }
}
