// What is typed into the search is asked as a person meant it. Material searches for each word as the beginning of words, so that "in" finds
// "install" and "invisible": here a sentence's small words are left out, and a word that is typed to its end is searched whole (lunr's
// pipeline still finds its other forms). The last word stays a beginning while one types.
(() => {
  "use strict"
  const SMALL = new Set(("a about after all also am an and any anything are as at be because been but by can cannot could did do does doing for " +
    "from get gets give given go goes had has have having he her here him his how i if in into is it its just like make makes may me might my " +
    "need needs of on one ones or other others our out own shall she should so some such than that the their them then there these they " +
    "this those to too use used using want was we were what when where which while who whom whose why will with would you your").split(" "))
  const QUERY = 2 // Material's type of message to the search's worker
  const OPERATOR = /["+~^:*]|(?:^|\s)-(?=\w)/ // whoever writes these means them
  const OPTION = /(^|\s)--(?=\w)/g // an option of a command, and no operator: sbatch --time

  function meant(text) {
    const typed = text.toLowerCase().replace(OPTION, "$1").replace(/[?!.,;]+(?=\s|$)/g, "")
    if (OPERATOR.test(typed)) return text
    const words = typed.split(/\s+/).filter(Boolean)
    const kept = words.filter(word => !SMALL.has(word))
    if (kept.length === 0) return text
    const unfinished = /\S$/.test(text) && kept.at(-1) === words.at(-1) ? [kept.at(-1)] : []
    // A key is written whole on most pages (harvest.gpu_type), and under its section's heading in the reference (gpu_type).
    const keys = kept.filter(word => /^[a-z_]+\.[a-z_]+$/.test(word)).map(word => word.split(".")[1])
    return [...[...kept, ...keys].map(word => `${word}^1`), ...unfinished].join(" ")
  }

  const { postMessage } = Worker.prototype
  Worker.prototype.postMessage = function (message, ...rest) {
    if (message && message.type === QUERY && typeof message.data === "string") message = { ...message, data: meant(message.data) }
    return postMessage.call(this, message, ...rest)
  }
})()
