//! Who can take part, and what ranks are called.

use super::*;

fn card(process: u128) -> Card {
    let host = HostId { boot: "b".into(), name: "n".into(), network: "net:[1]".into() };
    let (fabric, fabric_only) = (Vec::new(), false);
    Card { host, process, uuid: [1; 16], key: 1, fabric, fabric_only, problem: None }
}

fn verdict(cards: &[Card], members: &[usize]) -> Result<Vec<Card>> {
    let all: Vec<_> = cards.iter().map(|card| postcard::to_stdvec(card).unwrap()).collect();
    read(&all, members)
}

#[test]
fn who_cannot_take_part_is_named_with_the_way_out() {
    assert_eq!(verdict(&[card(1), card(2)], &[0, 1]).unwrap().len(), 2);
    let mut away = card(1);
    away.host.boot = "other".into();
    let e = verdict(&[card(1), away], &[0, 1]).unwrap_err().to_string();
    assert!(e.contains("rank 1") && e.contains("nccl"), "{e}");
    let mut poor = card(1);
    poor.problem = Some("cuMemCreate failed: out of memory".into());
    let e = verdict(&[card(1), card(1), poor.clone()], &[0, 1, 2]).unwrap_err().to_string();
    assert!(e.contains("rank 2") && e.contains("out of memory"), "{e}");
    // Ranks of a node go by their numbers among all.
    let e = verdict(&[card(1), poor], &[4, 6]).unwrap_err().to_string();
    assert!(e.contains("rank 6"), "{e}");
    assert!(read(&[vec![1, 2]], &[0]).is_err());
    let e = no_peer_access(0, 3, 0);
    assert!(e.contains("rank 0") && e.contains("rank 3") && e.contains("nccl"), "{e}");
}

/// Memory that a rank of a test shares.
struct Paper(std::os::fd::OwnedFd);

impl Shared for Paper {
    type Mapped = ();

    fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.0)
    }

    fn map(&self) -> Result<()> {
        Ok(())
    }

    fn map_foreign(&self, _: usize, _: std::os::fd::OwnedFd) -> Result<()> {
        Ok(())
    }
}

/// What rank 0 hears, which maps rank 2 and not rank 1, when rank 2 has gone.
fn without_rank_2<T>(f: impl Fn(&Near<'_>, Deadline) -> Result<T> + Sync) -> TransportError {
    let run = |all: Group| {
        let rank = all.rank();
        let members: Vec<usize> = (rank % 2..3).step_by(2).collect();
        let group = all.split(rank as u32 % 2, 0).unwrap().part_of_another(&members);
        let near = Near { all: &all, group: &group, members: &members, streams: 0 };
        let deadline = Deadline::after(std::time::Duration::from_secs(20));
        (rank == 0).then(|| f(&near, deadline).err()).flatten()
    };
    std::thread::scope(|scope| {
        let run = &run;
        let ranks: Vec<_> =
            Group::local(3).unwrap().into_iter().map(|all| scope.spawn(move || run(all))).collect();
        let heard = ranks.into_iter().filter_map(|rank| rank.join().unwrap()).next();
        heard.expect("rank 2 has gone")
    })
}

/// Ranks of a node have other numbers within it.
#[test]
fn a_rank_that_is_missed_goes_by_its_number_among_all() {
    let spec = WindowSpec { bytes: 4096, flags: 1 };
    let fd = || rustix::fs::memfd_create("paper", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let errors = [
        without_rank_2(|near, deadline| near.together(deadline, None)),
        without_rank_2(|near, deadline| near.share_boards(spec, true, deadline)),
        without_rank_2(|near, deadline| near.share_boards(spec, false, deadline)),
        without_rank_2(|near, deadline| near.swap(Ok(Paper(fd())), deadline)),
    ];
    for error in errors {
        assert_eq!(error.peer(), Some(2), "{error}");
        assert!(error.to_string().contains("rank 2"), "{error}");
    }
}

#[test]
fn fabric_handles_are_for_all_or_none() {
    let with = |has: bool, only| {
        let fabric = if has { vec![1; 64] } else { Vec::new() };
        Card { fabric, fabric_only: only, ..card(1) }
    };
    assert!(by_fabric(&[with(true, false), with(true, true)], &[0, 1]).unwrap());
    assert!(!by_fabric(&[with(true, false), with(false, false)], &[0, 1]).unwrap());
    let lacking = by_fabric(&[with(true, true), with(false, false)], &[2, 5]);
    let e = lacking.unwrap_err().to_string();
    assert!(e.contains("rank 2") && e.contains("rank 5"), "{e}");
}

#[test]
fn ranks_of_one_gpu_are_told_apart_by_process() {
    let on = |gpu: u8, process| Card { uuid: [gpu; 16], ..card(process) };
    let cards = [on(1, 7), on(1, 7), on(1, 8), on(2, 7)];
    use Beside::{No, Process, Thread};
    assert_eq!(beside(0, &cards), Some(vec![No, Thread, Process, No]));
    assert_eq!(beside(2, &cards), Some(vec![Process, Process, No, No]));
    assert_eq!(beside(3, &cards), None);
}
